<?php
// Put an order into the tube "orders": composer require pda/pheanstalk, then php produce.php 17.
// With Debian's package (apt-get install php-pda-pheanstalk) there is nothing to require by composer.
require is_file('vendor/autoload.php') ? 'vendor/autoload.php' : 'Pheanstalk/autoload.php';

use Pheanstalk\Pheanstalk;

$queue = Pheanstalk::create('127.0.0.1', getenv('PORT') ?: 11300);
$job = $queue->useTube('orders')->put(json_encode(['order' => (int) $argv[1]]), ttr: 60);
echo "put {$job->getId()}\n";
